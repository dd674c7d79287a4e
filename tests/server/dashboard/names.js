const found = [];
const nameOf = (element) => (element.getAttribute('aria-label') ?? '').trim()
  || (element.getAttribute('aria-labelledby') ?? '').split(' ').map((id) => document.getElementById(id)?.textContent ?? '').join('').trim()
  || [...(element.labels ?? [])].map((label) => label.textContent).join('').trim()
  || (element.matches('button, summary, a') ? element.textContent.trim() : '');
for (const element of document.querySelectorAll('button, input, select, textarea, summary, a, canvas, [role=img], section, dialog')) {
  if (!nameOf(element)) found.push(element.outerHTML.slice(0, 100));
}
const ids = [...document.querySelectorAll('[id]')].map((element) => element.id);
found.push(...ids.filter((id, place) => ids.indexOf(id) !== place).map((id) => `two elements are called ${id}`));
for (const element of document.querySelectorAll('[for], [aria-labelledby], [aria-describedby]')) {
  for (const name of ['for', 'aria-labelledby', 'aria-describedby']) {
    const id = element.getAttribute(name);
    if (id && !document.getElementById(id)) found.push(`${name}=${id} points nowhere`);
  }
}
if (document.querySelectorAll('h1').length !== 1 || document.querySelectorAll('main').length !== 1) found.push('one h1 and one main');
if (!document.documentElement.lang || !document.title) found.push('language or title is missing');
return found;
